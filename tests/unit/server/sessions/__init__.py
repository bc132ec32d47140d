"""Who is joined to a server, and whose memory it serves."""
