"""Writes the table of the README's first example into the current folder: hospital stays of SYNTHETIC patients.

python docs/tutorials/cohort.py      # writes cohort.csv: one row a stay, and whether the patient came back
"""

from __future__ import annotations

from pathlib import Path

from dptune.records.diabetes.synthetic_cohort import generate_cohort

_COLUMNS = {
    "patient_nbr": "patient",
    "age": "age",
    "time_in_hospital": "days",
    "number_inpatient": "inpatient_visits",
    "number_emergency": "emergency_visits",
    "readmitted": "readmitted",
}


def main() -> None:
    """Write 4,000 stays of one to eight stays a patient; the same ones each time."""
    table = generate_cohort(4000, 7, kind="private")[list(_COLUMNS)].rename(columns=_COLUMNS)
    table["age"] = table["age"].str.strip("[)").str.replace("-", " to ")
    table["readmitted"] = (table["readmitted"] != "NO").map({True: "yes", False: "no"})
    table.to_csv(Path("cohort.csv"), index=False)
    print("wrote cohort.csv: 4000 stays (SYNTHETIC)")


if __name__ == "__main__":
    main()
