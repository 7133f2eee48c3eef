"""The one address that every client calls: Lambda and the HTTP API run here, the rest is sent on."""
