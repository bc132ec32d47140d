"""Traffic between a domain's memory and its slower tiers. It knows no sockets and no sessions' processes."""
