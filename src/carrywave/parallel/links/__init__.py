"""Messages between neighbouring stages, by three kinds of links."""
