"""The same worker in several places: in the program's own process, and in processes of its own."""
