"""How processes reach a server: its sockets, what each process may take, and who is at the other end."""
