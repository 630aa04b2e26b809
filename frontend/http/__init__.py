"""HTTP on the server's side: connections, requests, authentication, request bodies, errors, the OpenAPI document."""
