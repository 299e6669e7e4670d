"""The command-line programs of the project; each is a thin layer over the packages."""
