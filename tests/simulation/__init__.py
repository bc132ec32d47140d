"""Everything but the sockets on one virtual clock and one seed; and tests with real processes and real kills."""
