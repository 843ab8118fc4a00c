"""One readable file each: configuration, modules, losses, loop."""
