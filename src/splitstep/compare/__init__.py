"""Many runs as one experiment: equal terms, several seeds, and whether a difference is more than luck."""
