"""What a set of results says, in words computed from it, and how sure that is."""
