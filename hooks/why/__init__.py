"""Why a head prefers one key to another: the difference of two scores, by what wrote them."""
