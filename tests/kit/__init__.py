"""What several tests share: harnesses, fakes, contracts and stand-ins, by the part that they are for."""
