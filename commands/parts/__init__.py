"""What commands share, and the long ones' halves."""
