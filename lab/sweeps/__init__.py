"""Many runs that differ in optimizer, rate and seed: which there are, doing them, their results."""
