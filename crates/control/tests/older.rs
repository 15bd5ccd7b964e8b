//! Requests with a field that a control plane of the version before does not know, and can do without.

use rackbus_control::api::BorrowRequest;
use rackbus_control::compositions::CompositionRequest;
use rackbus_control::{ControlClient, ControlClientError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

/// Refuses the first request for its field, and the second one since somebody has the function; what was asked.
async fn two_requests(listener: UnixListener) -> [String; 2] {
    let unknown = "Failed to deserialize the JSON body into the target type: starter: unknown field \
                   `starter`, expected one of `function`, `borrower` at line 1 column 14";
    let held = r#"{"code":"held","error":"gamma has it","remedy":"wait"}"#;
    let mut heard = [String::new(), String::new()];
    for (heard, (status, said)) in heard.iter_mut().zip([(422, unknown), (409, held)]) {
        let (mut caller, _) = listener.accept().await.unwrap();
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"}") {
            assert!(caller.read_buf(&mut bytes).await.unwrap() > 0);
        }
        *heard = String::from_utf8(bytes).unwrap();
        let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n", said.len());
        caller.write_all(format!("{head}{said}").as_bytes()).await.unwrap();
    }
    heard
}

#[tokio::test]
async fn the_starter_of_a_vm_is_not_sent_to_an_older_control_plane() {
    let folder = tempfile::tempdir().unwrap();
    for composition in [false, true] {
        let socket = folder.path().join(format!("{composition}.sock"));
        let asked = tokio::spawn(two_requests(UnixListener::bind(&socket).unwrap()));
        let client = ControlClient::new(&socket);
        let starter = Some("1.2.3".to_owned());
        let refused = match composition {
            false => {
                let request =
                    BorrowRequest { starter, ..BorrowRequest::new("alpha/nvme0", "beta") };
                client.borrow_as(&request).await.unwrap_err()
            }
            true => {
                let request = CompositionRequest { starter, ..CompositionRequest::default() };
                client.borrow_composition("db", &request).await.unwrap_err()
            }
        };
        let told = |error: &ControlClientError| matches!(error, ControlClientError::Refused(refused) if refused.code == "held");
        assert!(told(&refused), "{refused}");
        let asked = asked.await.unwrap();
        assert_eq!(asked.map(|it| it.contains("\"starter\":\"1.2.3\"")), [true, false]);
    }
}
