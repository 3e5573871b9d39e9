"""The parts of checkpoints: what is saved where (plan), memory images, files, object stores. See `elastipod.checkpoint`."""
