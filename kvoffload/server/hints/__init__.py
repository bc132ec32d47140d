"""What hints of engines and operators do: prefixes that are retained, or brought up before their request comes. No
sockets are known here, and nothing waits."""
