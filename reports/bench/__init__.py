"""Write reports of measurements."""
