"""Frontend process: HTTP, client APIs, live requests, admission, load balancing and the metrics page."""
