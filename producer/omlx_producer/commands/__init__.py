"""What commands of several programs share: the options of requests and runs, errors, endings."""
