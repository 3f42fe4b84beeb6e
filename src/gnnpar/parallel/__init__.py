"""One folder a method, and what several of them need."""
