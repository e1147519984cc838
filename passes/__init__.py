"""Graph passes that find reduce-scatters and rewrite them into a compressed all-to-all."""
