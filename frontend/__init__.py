"""Frontend process: HTTP, client APIs, sessions, admission, load balancing and the metrics page."""
