"""How close each host kernel comes to what limits it."""
