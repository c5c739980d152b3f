"""The files of the page at `/`, which `serve.dashboard` sends as one document."""
