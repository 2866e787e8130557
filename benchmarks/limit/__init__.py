"""What no program can beat on this processor: its own rate of multiply-adds, and of one pass over a call's tensors."""
