"""The vocabulary that the layers share: rows, configuration, seeds, names, errors."""
