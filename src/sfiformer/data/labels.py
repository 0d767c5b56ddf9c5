"""What labels look like as they were written."""


def are_few(odd: int, others: int) -> bool:
    """Whether so many labels unlike the others are slips among them: at most one in twenty, or one of more than ten."""
    return odd <= (odd + others) // 20 or (odd == 1 and others >= 10)
