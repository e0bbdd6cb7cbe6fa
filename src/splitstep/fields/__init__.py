"""What moves the particles: attention (interaction, coupling) and feed-forward networks (convection)."""
