"""What requests say of their prefixes: keep it, bring it up, let it go. Must not wait, nor decide what is loaded."""
