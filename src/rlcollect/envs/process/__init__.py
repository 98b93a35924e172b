"""A vector environment of Gymnasium whose lanes are stepped in worker processes; it knows no policy."""
