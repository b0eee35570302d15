"""One file a method: options, class, citation, registration."""
