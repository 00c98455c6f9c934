"""What layers keep of rows: keys and values, and recurrent states."""
