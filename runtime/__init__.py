"""What the parallel strategies stand on. Imports torch alone, and none of them."""
