"""What the papers say of their schemes, so that a comparison can answer whether it holds at its scale."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One scheme is better than another, or no worse."""

    scheme: str
    other: str
    says: str
    source: str
    no_worse: bool = False

    def answer(self, verdict: str) -> str:
        """What the verdict about the two schemes says of the claim."""
        if self.no_worse:
            return "does not hold" if verdict == "worse" else "not contradicted"
        return {"better": "holds", "worse": "the opposite holds"}.get(verdict, "not shown")


LU, ZHONG, DUTTA = "Lu et al. 2019", "Zhong et al. 2022", "Dutta et al. 2021"

# A new claim is one row.
CLAIMS = (
    Claim("macaron", "transformer", "Macaron is better than the Transformer", LU),
    Claim("parallel", "transformer", "the parallel layer is better than the sequential one", ZHONG),
    Claim("parallel-rk4", "parallel", "RK4 is better than Euler's method for the parallel layer", ZHONG),
    Claim("parallel", "parallel/num_independent_layers=3", "quality falls when layers share weights", ZHONG),
    Claim("parallel", "parallel/num_independent_layers=1", "quality falls when all layers share weights", ZHONG),
    Claim("transevolve-full-1", "transformer", "evolved attention does as well with fewer parameters", DUTTA, True),
    Claim("transevolve-random-1", "transformer", "and so it does with random rotations", DUTTA, True),
)
