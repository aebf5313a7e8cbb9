"""`doctor`: check the source."""

import sys
from dataclasses import asdict

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json, print_table


def doctor(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Check that the source is ready; if not, show what to run.

    Checks settings, privileges, replica identities, publication and slot; changes nothing. Exit code 0 if no check
    fails; warnings do not count.

    Example: millrace doctor --json
    """
    from cdc.capture.source.doctor import Verdict, examine
    from cdc.service.daemon.process import settings_from

    findings = examine(settings_from(config).source)
    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(finding.verdict, finding.check, finding.object, finding.message) for finding in findings]
        print_table(("", "check", "object", "finding"), rows)
        for finding in findings:
            if finding.remedy:
                OUT.print(f"{finding.verdict}: {finding.object}: {finding.remedy}", markup=False, soft_wrap=True)
    if failed:
        sys.exit(1)
