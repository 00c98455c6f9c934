"""What a process that submits jobs does with Redis: submit, follow, wait, cancel, look."""
