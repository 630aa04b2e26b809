"""Cost of failures and overload: stalls, goodput, and changed bytes."""
