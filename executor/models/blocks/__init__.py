"""What layers are made of: a file for each kind of mixer and of feed-forward. A block declares its tensors when it is made."""
