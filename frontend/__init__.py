"""The frontend process: connections, sessions, admission, the OpenAI dialect and the metrics page."""
