"""HTTP server: connections, requests, authentication, request bodies, errors, OpenAPI document."""
