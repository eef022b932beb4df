"""The command line. Importing this package imports no torch."""
