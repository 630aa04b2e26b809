"""What failures and overload cost: stalls, goodput, and whether a byte changes."""
