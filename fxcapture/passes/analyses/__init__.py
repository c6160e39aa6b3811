"""What passes ask of a graph; nothing here changes one."""
