"""A torch.compile backend that trains FSDP2 models with 4-bit gradient exchange."""
