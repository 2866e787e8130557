"""Stand-ins for hardware and libraries; README.md says for what, and when each may go."""
