"""State AwaitReplacement."""
