"""What a fit does on the driver, and hands to its ranks."""
