"""Parts that all folders of the server use: refusals, threads, parts of long work, and shares of users."""
