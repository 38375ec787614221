"""What the parallel strategies share. Imports torch, and none of the strategies."""
