"""The engines that are joined: domains, engines' sessions, what they registered, and the memory that they share or had
before."""
