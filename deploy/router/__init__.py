"""`quintet route`: load-balancing HTTP router for servers on other machines."""
