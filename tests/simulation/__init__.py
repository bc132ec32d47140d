"""Everything but the sockets on one virtual clock and one seed; and real processes with real kills beside it."""
