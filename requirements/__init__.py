"""What is installed and pinned, and what is known of it: a bill of materials, and a check against advisories."""
